"""The composition root: builds the rooms, runs the task tree, stops it in order."""
