"""What a run looks like: the HTML page, its panels and pictures."""
