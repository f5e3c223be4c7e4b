"""Programs that use tarry as anybody would. They import nothing of the package but the package itself."""
