"""What needs a tree library: one adapter each and one columnar tree table."""
