"""Names that the options of `kpt bench` take, without what they stand for, which costs torch."""

DTYPES = ("float32", "bfloat16", "float16")
