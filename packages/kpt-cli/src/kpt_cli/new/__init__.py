"""`kpt new`: the beginnings of repositories that plug into KPT."""
