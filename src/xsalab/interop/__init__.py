"""Files and formats of other projects."""
