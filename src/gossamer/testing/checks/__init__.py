"""The checks of ``check_method``, in one table."""
