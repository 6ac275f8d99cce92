"""Options that commands share, and the requests and components that they describe."""
