"""What a kernel must do, by subject; each check takes a trial and raises `AssertionError`."""
