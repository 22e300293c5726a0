// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
)

// errorList has the first errors of many. So the text of their join stays short, however
// many addresses and ports a service has.
type errorList struct {
	first []error
	more  int // number of further errors
}

// maxErrors is the maximum number of errors in an errorList.
const maxErrors = 4

// add adds err unless it is nil.
func (l *errorList) add(err error) {
	switch {
	case err == nil:
	case len(l.first) < maxErrors:
		l.first = append(l.first, err)
	default:
		l.more++
	}
}

// err returns the joined errors, or nil if there are none.
func (l *errorList) err() error {
	if l.more > 0 {
		return errors.Join(append(l.first[:maxErrors:maxErrors], fmt.Errorf("%d more errors", l.more))...)
	}
	return errors.Join(l.first...)
}
