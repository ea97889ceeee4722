"""An event of docs/step.html as a picture, for light pages and for dark ones: assets/step.png and
step-dark.png.

    python docs/draw_step.py

Needs Chromium, and a package that opens it: pip install playwright.
"""

import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent  # of the project
STILL = "mode=zero3&ranks=2&event=start-unshard-blocks.1-again&still=1"
PICTURES = {"light": "step.png", "dark": "step-dark.png"}


def main():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("draw_step.py: it opens a browser with a package: pip install playwright")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        sys.exit("draw_step.py: it needs a browser: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path)
        for scheme, name in PICTURES.items():
            page = browser.new_page(viewport=dict(width=900, height=100), device_scale_factor=1.5,
                                    color_scheme=scheme)
            page.goto(f"{(ROOT / 'docs' / 'step.html').as_uri()}#{STILL}")
            path = ROOT / "assets" / name
            page.screenshot(path=path, full_page=True)
            print(path)


if __name__ == "__main__":
    main()
