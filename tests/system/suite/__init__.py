"""All processes together: what holds only if everybody does their part."""
