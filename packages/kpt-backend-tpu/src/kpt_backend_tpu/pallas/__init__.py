"""The kernels as pure functions of JAX: arrays in, arrays out, what is static by keyword.

Nothing here knows torch. `kpt_backend_tpu.bridge` imports these modules when a call needs them: on a TPU torch_xla must
hold the device before JAX looks for it.
"""
