"""One file per hot operation: the plain torch reference, the fast form, the rule that picks."""
