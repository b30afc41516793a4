"""What programs cost, and when everything in them happens."""
