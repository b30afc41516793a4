"""What a machine takes: times of messages and stages, and costs fitted to them."""
