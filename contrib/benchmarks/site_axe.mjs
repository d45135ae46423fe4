// Opens every page of a site in Chromium, in three widths and both colour schemes, and looks for
// faults that axe-core finds, for pages wider than the window, and for requests to elsewhere.
//
//     npm install --no-save playwright-core axe-core
//     node contrib/benchmarks/site_axe.mjs SITE [PICTURES]
//
// PICTURES is a folder for screenshots. CHROMIUM names the browser, by default /usr/bin/chromium.
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { join, relative, resolve } from "node:path";
import { chromium } from "playwright-core";

const site = resolve(process.argv[2]);
const pictures = process.argv[3];
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const pages = readdirSync(site, { recursive: true }).filter((name) => name.endsWith(".html")).sort();
const faults = [];
let opened = 0;

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox"],
});
for (const colorScheme of ["light", "dark"]) {
  for (const width of [390, 1280, 1920]) {
    // axe is put into the page, which its policy refuses.
    const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, bypassCSP: true });
    const page = await context.newPage();
    let path;
    const note = (text) => faults.push(`${path} at ${width}, ${colorScheme}: ${text}`);
    page.on("request", (asked) => /^(file|data):/.test(asked.url()) || note(`asks for ${asked.url()}`));
    page.on("pageerror", (error) => note(error.message));
    for (path of pages) {
      await page.goto(`file://${join(site, path)}`);
      opened += 1;
      const over = await page.evaluate(() => {
        const root = document.documentElement;
        return root.scrollWidth - root.clientWidth;
      });
      if (over > 0) note(`${over} pixels too wide`);
      if (pictures) {
        const name = relative(".", path).replaceAll("/", "_").replace(".html", "");
        await page.screenshot({ path: join(pictures, `${name}-${width}-${colorScheme}.png`), fullPage: true });
      }
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => axe.run(document));
      for (const { impact, id, nodes } of violations) note(`${impact} ${id}: ${nodes[0].target}`);
    }
    await context.close();
  }
}
await browser.close();
console.log([...faults, `${opened} views of ${pages.length} pages, ${faults.length} faults`].join("\n"));
process.exitCode = faults.length ? 1 : 0;
