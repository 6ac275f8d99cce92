"""What made a log, as BibTeX entries: ``references.bib``, and which component stands for which."""
