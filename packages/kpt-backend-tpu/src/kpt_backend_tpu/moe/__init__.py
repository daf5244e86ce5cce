"""The ops of Mixture-of-Experts on TPUs: what torch's side does around the functions in `kpt_backend_tpu.pallas`."""
