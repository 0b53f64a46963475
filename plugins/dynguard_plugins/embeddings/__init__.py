"""First-party plugins: embeddings."""
