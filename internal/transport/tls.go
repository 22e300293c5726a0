// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/go-logr/logr"
)

// TLS names the PEM files for mutual TLS. Package remote has the same type and describes
// its fields.
type TLS struct {
	CAFile, CertFile, KeyFile, ServerName string
}

// Server returns the TLS settings for a server, or an error if the files are unusable.
// Later errors are only logged.
func (t TLS) Server(log logr.Logger) (*tls.Config, error) {
	files := &certFiles{TLS: t, log: log}
	if _, _, err := files.load(); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{"h2"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			cert, pool, err := files.load()
			if err != nil {
				return nil, err
			}
			return &tls.Config{
				MinVersion:             tls.VersionTLS13,
				NextProtos:             []string{"h2"},
				Certificates:           []tls.Certificate{*cert},
				ClientCAs:              pool,
				ClientAuth:             tls.RequireAndVerifyClientCert,
				SessionTicketsDisabled: true, // do not resume sessions: check each connection with the present authorities
			}, nil
		},
	}, nil
}

// certFiles contains the parsed files. It reads the files again when they change.
type certFiles struct {
	TLS
	log logr.Logger

	mu     sync.Mutex
	stamps [3]stamp
	cert   *tls.Certificate
	pool   *x509.CertPool
}

// stamp identifies a version of a file.
type stamp struct {
	modified time.Time
	size     int64
}

// load returns the certificate and the authorities. It returns an error only if the files
// have never been valid.
func (f *certFiles) load() (*tls.Certificate, *x509.CertPool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	stamps := [3]stamp{stampOf(f.CAFile), stampOf(f.CertFile), stampOf(f.KeyFile)}
	if f.cert != nil && stamps == f.stamps {
		return f.cert, f.pool, nil
	}
	cert, pool, err := f.read()
	switch {
	case err == nil:
		f.cert, f.pool, f.stamps = cert, pool, stamps
	case f.cert == nil:
		return nil, nil, err
	default:
		f.log.Error(err, "Cannot load changed certificates; keeping the previous ones")
		f.stamps = stamps
	}
	return f.cert, f.pool, nil
}

func (f *certFiles) read() (*tls.Certificate, *x509.CertPool, error) {
	if f.CAFile == "" || f.CertFile == "" || f.KeyFile == "" {
		return nil, nil, errors.New("TLS needs three files: certificate authorities, a certificate and its key")
	}
	cert, err := tls.LoadX509KeyPair(f.CertFile, f.KeyFile)
	if err != nil {
		return nil, nil, fmt.Errorf("load certificate %s with key %s: %w", f.CertFile, f.KeyFile, err)
	}
	authorities, err := os.ReadFile(f.CAFile)
	if err != nil {
		return nil, nil, fmt.Errorf("read certificate authorities: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(authorities) {
		return nil, nil, fmt.Errorf("read certificate authorities: %s has no PEM certificate", f.CAFile)
	}
	return &cert, pool, nil
}

func stampOf(path string) stamp {
	info, err := os.Stat(path)
	if err != nil {
		return stamp{}
	}
	return stamp{info.ModTime(), info.Size()}
}
