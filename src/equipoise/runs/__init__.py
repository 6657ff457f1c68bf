"""One run or many, from settings to `result.json`."""
