"""The ops of attention on TPUs: what torch's side does around `kpt_backend_tpu.pallas.attention`."""
