"""`kpt bench cpu`: what the CPU's kernels do, beside their peers and beside what the machine could do at best."""
