"""Packages of models: their manifest and their program, which are checked before torch may run anything of them."""
