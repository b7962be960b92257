"""Who lives, what is in whose hands, and what becomes of the messages of those who die."""
