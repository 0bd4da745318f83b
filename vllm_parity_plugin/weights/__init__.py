"""Weight updates: what must arrive, where it is staged, how it is applied."""
