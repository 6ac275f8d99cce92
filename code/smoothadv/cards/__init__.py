"""The annex of the board: cards of logs, their rankings, and models on the Hugging Face hub."""
