// Tables and code that scroll in their own box can be reached with the keyboard in every browser. The theme makes the boxes late,
// and those of code sometimes later than a reader.
const reach = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex]), pre > code:not([tabindex])")) box.tabIndex = 0;
};
reach();
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
