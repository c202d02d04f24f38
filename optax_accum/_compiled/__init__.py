"""Compiled programs: read, counted, and made for accelerators that are not here."""
