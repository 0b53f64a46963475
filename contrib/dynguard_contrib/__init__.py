"""Bridges to other frameworks, and drop-in facades of the libraries that dynguard supersedes."""
