// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"fmt"
	"strings"
)

// maxErrorText is the maximum length of an error of a sink in logs and in Status, in bytes.
const maxErrorText = 4096

// brief returns err, or an error that wraps err and has only the beginning of the text. The
// text of an error may name each address and port of a service, and a service may have very
// many.
func brief(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	if len(text) <= maxErrorText {
		return err
	}
	begin := strings.ToValidUTF8(text[:maxErrorText], "")
	return &briefError{err, fmt.Sprintf("%s... (%d more bytes)", begin, len(text)-maxErrorText)}
}

// briefFailed returns a copy of the map failed with brief errors.
func briefFailed(failed Failed) Failed {
	out := make(Failed, len(failed))
	for key, err := range failed {
		out[key] = brief(err)
	}
	return out
}

type briefError struct {
	err  error
	text string
}

func (e *briefError) Error() string { return e.text }

func (e *briefError) Unwrap() error { return e.err }
