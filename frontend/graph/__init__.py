"""What graphs of ONNX and of torch.export have in common: steps, ropes, weights."""
