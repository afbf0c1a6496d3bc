"""`python -m stepwell`: the same as `stepwell`."""

from stepwell.cli import main

if __name__ == "__main__":
    main()
