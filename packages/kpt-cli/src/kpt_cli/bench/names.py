"""Names that the options of `kpt bench` take, without what they stand for, which costs torch."""

#: The groups of rows of `kpt bench cpu`, in the order in which they are measured.
GROUPS = ("decode", "product", "prefill", "step", "gating", "sorting")
DTYPES = ("float32", "bfloat16", "float16")
