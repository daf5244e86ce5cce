// Tables that scroll in their own box can be reached with the keyboard in every browser. The theme makes the boxes late.
const boxes = new MutationObserver(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) box.tabIndex = 0;
});
boxes.observe(document.body, { childList: true, subtree: true });
