"""The ops of 8-bit numbers on TPUs: what torch's side does around `kpt_backend_tpu.pallas.fp8_linear`."""
