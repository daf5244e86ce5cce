"""The pytest plugin: `pytest --kpt-backend=NAME`."""
