"""What is compiled ahead of time of each kernel of grouped products, and what its code must be on each chip."""
