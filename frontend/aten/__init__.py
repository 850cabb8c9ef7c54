"""Programs of `torch.export`, raised to plait's ops: a graph of ATen in, a tape of ops and the weights they use out."""
