"""Who may do what: keys, roles, the table of routes, and the record of control calls."""
