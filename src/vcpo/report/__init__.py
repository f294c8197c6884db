"""Reading finished runs: figures, the HTML report, and tables of methods and seeds."""
