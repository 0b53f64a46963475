"""First-party plugins: compression."""
