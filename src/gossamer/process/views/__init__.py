"""Views: the lists of members of collectives, agreed on by messages between workers."""
