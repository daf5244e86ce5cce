"""A distribution with an op, its cases and a backend, whose kernels differ in speed by the work that they do."""

ENTRY_POINTS = """
    [kpt.ops]
    tuned = tuned_plugin:OPS

    [kpt.cases]
    tuned = tuned_plugin:TABLES

    [kpt.backends]
    tuned = tuned_plugin:BACKEND
"""

SOURCE = """
    import torch
    from torch import Tensor

    import kpt_core
    from kpt_core import Kernel
    from kpt_optimize.cases import Case, CaseTable
    from kpt_core.policy import next_power_of_two


    def size_key(call):
        return (next_power_of_two(call.x.shape[0]),)


    def times(count, x, weight):
        for _ in range(count):
            result = x @ weight
        return result


    @kpt_core.op("tuned.product", size_key=size_key)
    def product(x: Tensor, weight: Tensor) -> Tensor:
        '''Multiply matrices, ninety times over.'''
        return times(90, x, weight)


    def slow(call):
        return times(30, call.x, call.weight)


    def quick(call):
        return times((call.config or {"times": 3})["times"], call.x, call.weight)


    def wrong(call):
        return call.x @ call.weight.flip(0)


    CONFIGS = [{"times": 1}, {"times": 9}]
    OPS = (product,)
    TABLES = (
        CaseTable(
            op="tuned.product",
            build=lambda generator, rows=64: {
                "x": torch.randn(rows, 128, generator=generator, dtype=torch.float64),
                "weight": torch.randn(128, 128, generator=generator, dtype=torch.float64),
            },
            cases=(Case(name="model", model=True), Case(name="one row", sizes={"rows": 1})),
            dtypes=(torch.float32,),
        ),
    )


    class Backend(kpt_core.Backend):
        name = "tuned"
        device_types = ("cpu",)

        def kernels(self):
            return [
                Kernel("tuned.product", "tuned_plugin:slow", priority=9),
                Kernel("tuned.product", "tuned_plugin:quick", configs="tuned_plugin:CONFIGS"),
                Kernel("tuned.product", "tuned_plugin:wrong"),
                Kernel("tuned.product", "tuned_plugin:choosy", requires={"warp9"}),
            ]


    BACKEND = Backend()
"""
