"""FP8 in Triton."""
