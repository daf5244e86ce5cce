"""Serve a package by the Open Inference Protocol v2, over REST and gRPC."""
