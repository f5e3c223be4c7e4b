"""Programs that use tarry as users do. They import nothing of the package but the package itself."""
