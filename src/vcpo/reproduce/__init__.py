"""The paper's figures and tables at a size that runs on a CPU, with a computed verdict for every claim."""
