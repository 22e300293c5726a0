// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"errors"
	"strings"
	"testing"
)

func TestDrawIsRandom(t *testing.T) {
	if a, b := draw(), draw(); a == b {
		t.Errorf("%v twice", a)
	}
}

func TestBriefKeepsTextsUpToTheLimit(t *testing.T) {
	whole := errors.New(strings.Repeat("x", maxErrorText))
	if err := brief(whole); err != whole {
		t.Errorf("the text became %q", err)
	}
	if err := brief(errors.New(whole.Error() + "y")); !strings.HasSuffix(err.Error(), "x... (1 more bytes)") {
		t.Errorf("the text became %q", err)
	}
}
