"""See the package."""

from tests.fuzz.sweep import main

raise SystemExit(main())
