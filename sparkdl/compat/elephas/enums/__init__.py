"""Names of modes and frequencies."""
