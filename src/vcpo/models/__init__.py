"""transformers causal language models: loading, making small ones, and the attention that both roles share."""
