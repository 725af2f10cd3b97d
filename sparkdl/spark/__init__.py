"""The only place for pyspark: the user's model, the stage that trains it, the data's columns."""
