"""Interactive pages of the book: figures of the program, and a page that shows them."""
