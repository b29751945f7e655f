"""What was acknowledged is there after the power is cut: the page cache, unlike under kill -9, is gone."""
